"""Plans that are told apart by short runs, where predictions cannot."""
