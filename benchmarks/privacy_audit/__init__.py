"""An audit of what ``[privacy]`` promises: can the noise be told from what it should hide?"""
