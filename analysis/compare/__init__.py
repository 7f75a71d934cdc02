"""What changed between runs?  Is it noise, and do they train the same?"""
