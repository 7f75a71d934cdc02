"""Where do the numbers of the documentation come from?"""
