"""`oktopk compare`: the same recipe, trained with several algorithms, settings and seeds.

command.py      flags, and all that the command does
grid.py         variants, cells, and the configuration of each
setting.py      what all cells share: recipe, values, workers and their links
folder.py       the folder of a comparison, and the state of its cells
running.py      one cell in processes of its own
progress.py     how far the grid is
trained.py      what a finished cell came to
statistics.py   spread, paired differences, Student's t
results.py      a row for each variant
tables.py       rows as text
page.py         the report page
"""
