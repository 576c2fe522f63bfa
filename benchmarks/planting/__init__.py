"""Jobs with a planted cause of slowness, and where each is planted."""
