"""A plan for every head: candidates, their scores on captured attention, and the allotment of slots."""
