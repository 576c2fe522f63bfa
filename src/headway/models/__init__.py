"""Published models as tables of layers, and modules that stand in for them where no accelerator is.

`headway.models.catalogue` lists the tables: parameters as published, work counted from the shapes.
`headway.models.roofline` turns work into modelled times, `headway.models.paced` into a module that takes these times.
"""
