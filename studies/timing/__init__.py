"""What would wrong ways to time a step have concluded?"""
