"""What there is to choose from: methods, nets, keys of a config, presets."""
