"""What a plan costs in quality: captured attention, its exact answers, and the errors against them."""
