"""Samples for people to look at: pictures side by side with what is known of them, as an image or in a terminal.

Pictures come in as uint8 arrays, and captions as text; a picture of all of them comes out. Commands call it.
"""
