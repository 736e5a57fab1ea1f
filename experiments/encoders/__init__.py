"""One rule for the shares of a plan, chosen on some encoders and judged on others."""
