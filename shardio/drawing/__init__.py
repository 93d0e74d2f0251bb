"""Pictures for people: side by side with captions, as thumbnails for pages, or in a terminal.

Pictures come in as uint8 arrays, and captions as text; images and text come out. Nothing here knows a set.
"""
