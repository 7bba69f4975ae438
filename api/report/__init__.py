"""A campaign as one document to mail: HTML with drawings in it, without scripts, that loads nothing."""
