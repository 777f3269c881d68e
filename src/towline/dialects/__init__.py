"""The provider APIs that harnesses speak."""
