"""What is broken on purpose, and the tests that must notice."""
