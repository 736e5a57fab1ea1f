"""What a plan costs in quality: exact answers of captured attention, and the errors against them."""
