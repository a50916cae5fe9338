"""Jobs: many questions about many documents, answered once each, however often they are begun."""
