"""The programs of docs/recipes; tests/docs runs each of them."""
