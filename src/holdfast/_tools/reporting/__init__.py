"""Reports: one page for the browser about a checkpoint, all in one file.

``facts.py`` says what is known of a checkpoint as plain JSON, in columns; the page, whose parts are in ``page/``, shows
it. The page asks nothing of any network.
"""
