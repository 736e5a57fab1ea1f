"""A plan for every head: candidates, their scores on captured attention, and how slots are allotted."""
