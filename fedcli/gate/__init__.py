"""What a site allows to leave it. Nothing here imports torch: a site that stays looks here, too."""
