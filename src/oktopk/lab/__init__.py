"""The laboratory: real links on one machine, and what is measured on them."""
