"""`oktopk plan`: what a step would take on other hardware, by the equations of `oktopk.cost`."""
