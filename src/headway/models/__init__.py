"""Published models as tables of layers.

`headway.models.catalogue` lists the tables: parameters as published, work counted from the shapes.
`headway.models.roofline` turns work into modelled times.
"""
