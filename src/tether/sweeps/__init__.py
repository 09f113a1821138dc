"""`tether sweep`: many runs of one recipe with other settings, and the comparison of them."""
