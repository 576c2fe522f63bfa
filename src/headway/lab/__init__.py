"""A cluster on one machine: shaped links, slow workers, failures.

`headway.lab.spec.LabSpec` says what is wanted, `headway.lab.launch.run` runs a command in it, and
`headway.lab.state` knows which labs run and which left something behind.
"""
