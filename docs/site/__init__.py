"""What `mkdocs build` adds to the pages: links that leave docs/, a page for every part of a plan, the reference."""
