"""Its presence puts this folder on the import path: tests import ``builders`` from it."""
