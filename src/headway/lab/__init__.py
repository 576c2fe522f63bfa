"""Emulates a cluster on one machine: shaped links, slow workers, failures.

`headway.lab.spec.LabSpec` describes a lab, `headway.lab.launch.run` runs a command in it, and
`headway.lab.state` knows which labs are running or left something behind.
"""
