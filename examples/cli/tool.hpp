// The tool `kvevict`, as a function: a project with policies of its own adds them to the registry and calls run().
#pragma once
#include <iosfwd>
#include <string>
#include <vector>

#include "kvevict/naming/registry.hpp"

namespace kvevict::tool {

// Everything this library holds (naming/standard_parts.hpp), compiled once. LKV parts take the shipped checkpoints.
Registry standard_parts();

// The command line without the program's name. Returns the exit status: 0, 1 after "kvevict: error: ..." on `err` for a
// failure, 2 for wrong usage.
int run(std::vector<std::string> arguments, const Registry& registry, std::ostream& out, std::ostream& err);
int run(int argc, char** argv, const Registry& registry);

}  // namespace kvevict::tool
