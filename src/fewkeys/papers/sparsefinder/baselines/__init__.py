"""Published attention patterns, each in its paper's own terms: what a selector has to beat."""
