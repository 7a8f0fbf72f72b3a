"""Training: recipes, the loop, and the data and models that it needs."""
