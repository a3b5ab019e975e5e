"""How each request ended, and what that means for the filter."""
