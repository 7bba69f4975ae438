"""`make gpu-check`: the whole product on one device, in a few minutes, as one JSON and one page."""
