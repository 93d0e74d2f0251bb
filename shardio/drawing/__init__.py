"""Pictures as people see them: side by side with captions, as small ones for pages, as files, or in a terminal.

Pictures come in as uint8 arrays, and captions as text; images and bytes come out. Nothing here knows a set.
"""
