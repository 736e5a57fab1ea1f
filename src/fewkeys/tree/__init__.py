"""Rows of a stream as they are held: in fewer bits, and in files."""
