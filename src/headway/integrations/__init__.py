"""Getting into other people's programs: launchers and trainers."""
