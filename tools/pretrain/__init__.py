"""The scripts that make the small models of helpers/mini, and score them."""
