"""Passes: changes to a job outside its communication strategy, such as its precision; other packages can add some."""
