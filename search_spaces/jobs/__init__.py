"""Job knobs: settings of a trainer beside the layout, which campaigns can search."""
