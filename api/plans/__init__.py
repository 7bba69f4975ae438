"""Plans of campaigns with what the service has measured, and the training jobs of layouts."""
