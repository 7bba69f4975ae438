"""Exporters: a layout as the files of a training job."""
