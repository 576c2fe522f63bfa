"""Layer 5: over what. Measuring the links of a job."""
