"""Pictures for people: side by side with captions, as thumbnails for pages, or in a terminal.

Functions take pictures as uint8 arrays and captions as text, and return images or text. They know nothing of sets.
"""
