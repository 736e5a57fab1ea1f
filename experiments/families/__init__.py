"""Which families of models a plan can run in: tiny random models of each, tried and written down."""
