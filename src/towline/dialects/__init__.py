"""The provider APIs that harnesses call: chat, responses, messages, google."""
