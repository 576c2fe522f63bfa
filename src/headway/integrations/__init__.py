"""Integration into users' programs: launchers and training scripts."""
