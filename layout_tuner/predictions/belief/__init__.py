"""What is believed of layouts: step times and peaks, from the estimates and from measurements."""
