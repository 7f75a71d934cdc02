"""What changed between runs?"""
