"""Whether texts keep their nearest neighbours when they are embedded with few keys."""
