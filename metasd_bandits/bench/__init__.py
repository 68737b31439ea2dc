"""How fast decisions and replay are, beside other libraries."""
