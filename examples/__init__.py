"""Small programs that use Marq; tests/docs runs each of them."""
