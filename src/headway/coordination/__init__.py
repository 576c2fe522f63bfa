"""Who else: which workers average with which others, decided while they train."""
