"""Plans of campaigns, the training jobs of layouts, and the layouts behind cheap probes."""
